"""What does every engine do, whatever the framework? Agreeing with the peers, carrying timings and plans."""
