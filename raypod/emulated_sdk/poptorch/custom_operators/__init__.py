"""Custom operators: Python implementations in place of compiled ones, by the name of the operator."""
