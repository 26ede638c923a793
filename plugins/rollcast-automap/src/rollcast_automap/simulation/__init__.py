"""Event-by-event simulation of mappings, and its Gantt chart."""
