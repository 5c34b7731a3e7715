"""The command line `raypod`: the table of its subcommands, and those that no other package has."""
