"""Pure tensor mathematics: neighbours, tokenwise maps, geometry, divergences, statistics and controls."""
