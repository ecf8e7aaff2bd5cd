"""Which chip does what: measurements and an inventory in, a proven placement out."""
