"""Options that every environment takes: `solve_rate`, `budget`, and `ladder`, in addition to those of its builder."""
