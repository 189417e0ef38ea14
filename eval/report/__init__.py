"""`draftsmith eval report`: results as one HTML page, as pictures and as tables for papers."""
