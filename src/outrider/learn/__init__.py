"""Fine-tunes the drafting head of a server on its traffic: `outrider serve --learn`."""
