"""The trained block that predicts the token after the next one (MTP), for drafts."""
