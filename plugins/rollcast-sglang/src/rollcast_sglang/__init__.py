"""Generation with SGLang."""
