"""How bytes get from one staging memory to another. One module per transport; `base` is the seam."""
