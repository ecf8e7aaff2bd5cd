"""What is here, what works, and what would be refused and why.

model         a finding, a section, a diagnosis, and what they come to as an exit code
subject       what is looked at: configuration, plugins; errors in them are kept, to be shown
examination   the list of sections; one more is one more module, and one more line there
installation  section: deeplink itself, its configuration, secret and plugins
engines       section: engines found in this environment, against those that are tested
transports    section: each started for real, and tried out against a second process (`second`)
peer          section: an engine's contract and status, and whether it can hand over to the others
link          section: every transport tried out against another host, on which `--listen` runs
exchange      how two doctors try every transport they have in common: `calling` asks, `answering` does as it is asked;
              `trial` is one such try, `kit` the transports and the memory for it
canary        section: a known prompt through a handoff, and through each engine alone
chips         section: which chips this host has
"""
