"""The command line: display only, the work is done by the layers below."""
