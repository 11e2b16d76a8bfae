"""The command ``offloop mcp``: runs for agents, by the Model Context Protocol. Start with :mod:`.tools`."""
