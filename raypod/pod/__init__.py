"""Ray on the hosts of a pod, before and after a run: up and down, by ssh, closed to strangers."""
