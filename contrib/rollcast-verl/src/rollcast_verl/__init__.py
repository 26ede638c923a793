"""verl's workers, algorithms and rewards on rollcast, and a translation of its configuration.

Importing this package changes nothing and does not import verl. ``import rollcast_verl.hook`` puts verl's worker groups
on rollcast; see that module.
"""
