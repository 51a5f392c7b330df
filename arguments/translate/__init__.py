"""Command lines and run files written for other frameworks, in our flags.

Everything that slime, SkyRL, verl, TRL, OpenRLHF, Hydra and Megatron-LM spell differently is in
this package; parser and rules know only our flags. It happens in three places: `words` before a
command line is parsed, `flags` for one flag of a command line or run file that is not ours, and
`settings` for those that mean something else together, before any rule reads them. `names` has the
tables.
"""
