"""The browser tool: pages of a collection, or live ones, cut to what the policy looks for."""
