"""SnapKV and H2O: the scores that decide which rows are dropped."""
