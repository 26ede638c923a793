"""What runs inside SGLang's own processes."""
