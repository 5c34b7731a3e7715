"""How instances are started, monitored, stopped and replaced: inline, under Ray, or scripted for tests."""
