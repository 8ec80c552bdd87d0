"""Everything that is run from the command line. The library never imports it."""
