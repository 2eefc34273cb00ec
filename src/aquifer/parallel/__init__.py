"""One model on several devices: tensor parallel ranks, and what each of them has of the model."""
