"""What the formats of EAGLE-1 heads share: SafeAILab/EAGLE, vLLM and SGLang read one layout by rules of their own."""
