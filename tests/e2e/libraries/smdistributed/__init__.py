"""Stands in for SageMaker's libraries, which are not to be had."""
