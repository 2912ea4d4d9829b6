"""From a spec to a finished run folder: corpus, captured states, fits, measures, summaries."""
