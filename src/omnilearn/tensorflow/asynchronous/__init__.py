"""Asynchronous training: ParameterServerStrategy keeps the model on parameter servers, workers update it one by one."""
