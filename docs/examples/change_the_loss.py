"""Train EAGLE-3 with a loss of one's own: hard steps count more. Its settings are those of `train eagle3`."""

import dataclasses
import sys

import draftsmith


class Focal(draftsmith.LitDrafter):
    def loss(self, batch, step):
        found = super().loss(batch, step)
        if step is None:  # validation stays what it is
            return found
        return dataclasses.replace(found, loss=found.loss * found.loss.detach().clamp(max=3))


if __name__ == "__main__":
    data, target, output = sys.argv[1:4]
    print(draftsmith.fit("eagle3", Focal, config="eagle3-small", data=data, target=target, output=output))
