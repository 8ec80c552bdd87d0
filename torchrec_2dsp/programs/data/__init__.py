"""Synthetic clicks and sequences: any rank makes its part of any batch from a seed."""
