"""Train a small convolutional network in Keras on handwritten digits.

    pip install -e '.[examples]' 'keras>=3.10,<4' && python examples/train_cnn_keras.py --precision bfloat16

One line makes `fit`, `evaluate` and `predict` run in mixed precision: `model.stateless_call = jaxamp.amp(...)`. Keras'
own dtype policy stays at float32. For float16, Keras' own `LossScaleOptimizer` scales the loss.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import matplotlib.pyplot as plt
import numpy as np
from keras import layers
from rich import print
from rich.progress import Progress
from sklearn.datasets import load_digits

import jaxamp


def network(width):
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(2 * width, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )


class Bar(keras.callbacks.Callback):
    """A progress bar over the epochs."""

    def __init__(self, title):
        super().__init__()
        self.title = title

    def on_train_begin(self, logs=None):
        self.progress = Progress()
        self.task = self.progress.add_task(self.title, total=self.params["epochs"])
        self.progress.start()

    def on_epoch_end(self, epoch, logs=None):
        self.progress.advance(self.task)

    def on_train_end(self, logs=None):
        self.progress.stop()


def draw(history, path):
    plt.switch_backend("Agg")
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    epochs = range(1, len(history["loss"]) + 1)
    for axes, name, title in ((left, "loss", "cross entropy"), (right, "accuracy", "images recognised")):
        axes.plot(epochs, history[name], marker="o", label="training, with dropout")
        axes.plot(epochs, history[f"val_{name}"], marker="s", label="test images")
        axes.set(xlabel="epoch", ylabel=title)
        axes.grid(alpha=0.3)
        axes.legend()
    fig.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="a narrow network, a part of the images, two epochs")
    parser.add_argument("--out", default="cnn.png", help="where to save the picture of the training")
    options = parser.parse_args()
    width, count, epochs = (8, 400, 2) if options.small else (32, 1797, options.epochs)

    digits, order = load_digits(), np.random.default_rng(0).permutation(1797)[:count]
    images = ((digits.images - digits.images.mean()) / digits.images.std()).astype(np.float32)[order, ..., None]
    labels, split = digits.target.astype(np.int32)[order], count // 5

    keras.utils.set_random_seed(0)
    model, optimizer = network(width), keras.optimizers.Adam(2e-3)
    if options.precision != "float32":
        model.stateless_call = jaxamp.amp(model.stateless_call, compute_dtype=options.precision)
    if options.precision == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    history = model.fit(
        images[split:],
        labels[split:],
        validation_data=(images[:split], labels[:split]),
        batch_size=64,
        epochs=epochs,
        verbose=0,
        callbacks=[Bar(f"Keras, {options.precision}")],
    ).history
    print(f"Loss {history['loss'][0]:.3f} to {history['loss'][-1]:.3f}.")
    print(f"{history['val_accuracy'][-1]:.1%} of the test images recognised.")
    print(f"All variables are {' and '.join(sorted({str(v.dtype) for v in model.trainable_variables}))}.")
    draw(history, options.out)
    print(f"Picture of the training: {options.out}")


if __name__ == "__main__":
    main()
