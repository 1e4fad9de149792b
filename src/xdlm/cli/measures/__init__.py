"""What `xdlm eval` can measure, a module each."""
