"""What the formats of EAGLE-1 heads share: SafeAILab/EAGLE, vLLM and SGLang lay out one directory and read it by rules of their own."""
