"""dpfp-ray: a Ray-distributed harness for differentially private fine-tuning."""

__version__ = "0.1.0"
