"""Workers as local processes: what to start, starting it, stopping it without a trace."""
