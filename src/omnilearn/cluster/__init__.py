"""Where does it run? Resources found, the launcher, and one machine playing a heterogeneous cluster."""
