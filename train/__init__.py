"""Pretraining of a Llama-style decoder with exact, cuDNN or SageBwd attention: ``python -m train --preset tiny``."""
