"""The parts that some layers have: experts, and recurrent parts in place of attention."""
