"""One file a subcommand: light at its top, all rooms in its `main`; commands join rooms."""
