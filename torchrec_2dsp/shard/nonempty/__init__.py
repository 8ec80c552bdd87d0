"""Pooled exchange of the bags that have ids: `bags` finds them, `exchange` sends them."""
