"""Draw the pictures of the documentation that no benchmark draws: `python docs/pictures.py`.

`report.png` is a report's plot. `report_page.png` is its page, which takes a Chromium: `CHROMIUM=path`, or on the path.
"""

import os
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxamp

IMAGES = Path(__file__).with_name("images")
WIDTH, TOKENS, LAYERS, WORDS = 768, 1024, 4, 8192


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def decoder(params, ids):
    """The loss of a small decoder, with its head pinned by the policy below."""
    x = params["embed"][ids]
    for i in range(LAYERS):
        with jax.named_scope(f"block{i}"):
            with jax.named_scope("attention"):
                q, k, v = (norm(x) @ params[name] for name in "qkv")
                scores = jnp.where(jnp.tri(TOKENS, dtype=bool), q @ k.T / WIDTH**0.5, -1e9)
                x = x + jax.nn.softmax(scores) @ v
            with jax.named_scope("mlp"):
                x = x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]
    with jax.named_scope("head"):
        logits = norm(x) @ params["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], -1))


def report():
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    params = {name: shape(WIDTH, WIDTH) for name in "qkv"}
    params |= {"embed": shape(WORDS, WIDTH), "head": shape(WIDTH, WORDS)}
    params |= {"up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH)}
    policy = jaxamp.default_amp_policy | {"head": jaxamp.use_original_precision}
    ids = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    return jaxamp.amp_report(decoder, compute_dtype=jnp.bfloat16, amp_policy=policy)(params, ids)


def photograph(page: Path, picture: Path) -> str:
    """Take a picture of a page, and say how that went."""
    names = os.environ.get("CHROMIUM", "chromium"), "chromium-browser", "google-chrome"
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        return "no Chromium: the page was not photographed"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        view = opened.new_page(viewport={"width": 1200, "height": 800})
        view.goto(page.as_uri())
        view.screenshot(path=str(picture))
        opened.close()
    return f"picture {picture.name}"


def main() -> None:
    made = report()
    made.plot(IMAGES / "report.png")
    print("picture report.png")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        made.save(page)
        print(photograph(page, IMAGES / "report_page.png"))


if __name__ == "__main__":
    main()
