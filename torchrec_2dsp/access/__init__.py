"""Which rows are used how often, and which of them are hot."""
