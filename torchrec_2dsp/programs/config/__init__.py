"""Config files: TOML with overrides and includes, checked by sections that programs share."""
