"""Export a run's best adapter in PEFT's format, or merged into its base in the published layout; proven either way.

export    what to export, and where: either way's beginning and end; the upload
source    the adapter and its base, found; deltas: the adapter's changes by parameter
adapter   the adapter alone, written in PEFT's format
merge     the adapter merged into its base, in numbered steps
merged_files   files planned from headers, then written; rounding: merged values; proof: opened again and compared
card      the model card; screen: messages and progress
generate  text from a merged model, or from base + adapter
"""

from windlass.export.export import export, push_to_hub

__all__ = ["export", "push_to_hub"]
