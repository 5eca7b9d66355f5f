"""SnapKV and H2O: scores by which rows are dropped."""
