"""Which chips are here, what is known of them, and which engine plugin serves each. Imports no vendor's runtime.

profile    what is known of a chip: how it shows, who serves it, its caches and its rates, each value with its source
sources    where the facts were read
catalogue  the profiles, a module per vendor; one more chip is one more entry, or another package's
           `deeplink_register_chips`
tree       what the device tree says: PCI functions, device nodes, drivers
cpuinfo    what the processor says of itself
tool       a vendor's own tool, run with a deadline
output     what those tools print, read
cards      what the bus and a tool say of each device, and which profile that is
detect     all of it, put together
report     what was found, for `deeplink doctor` and `deeplink chips`
"""
