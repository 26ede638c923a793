"""The single controller: worker groups and the distribution of their calls."""
