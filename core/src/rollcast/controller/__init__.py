"""The single controller: worker groups, and how their calls are distributed."""
