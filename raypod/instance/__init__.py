"""The process of one instance: its PopTorch program, control flags, collectives and weight seeding."""
