"""How large a checkpoint on the hub is, asked of the hub where no config of it is here."""

from __future__ import annotations

from repro.spec.hub import ANSWER_SECONDS, PINNED_BYTES, endpoint, fetch, hub_cache


def ask_size(checkpoint: str, revision: str = "") -> int:
    """Return the bytes of a checkpoint's weights as the hub lists them; fetch its config.

    `HubError` says why the hub cannot tell.

    Parameters
    ----------
    checkpoint
        `owner/model` or `owner/model:FILE.gguf`.
    """
    from huggingface_hub import HfApi, hf_hub_download

    model, _, file = checkpoint.partition(":")
    pinned = "main" if not revision or revision.startswith(PINNED_BYTES) else revision

    def ask() -> int:
        listed = HfApi(endpoint=endpoint()).list_repo_tree(model, revision=pinned, recursive=True)
        sizes = {item.path: int(getattr(item, "size", 0)) for item in listed}
        if "config.json" in sizes and not file:
            hf_hub_download(
                model,
                "config.json",
                revision=pinned,
                cache_dir=hub_cache(),
                endpoint=endpoint(),
                etag_timeout=ANSWER_SECONDS,
            )
        wanted = [n for n in sizes if n == file or (not file and n.endswith(".safetensors"))]
        return sum(sizes[name] for name in wanted)

    return fetch(ask, hub_cache() / f"models--{model.replace('/', '--')}")
