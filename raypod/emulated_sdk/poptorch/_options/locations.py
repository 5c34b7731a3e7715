"""Where tensors live on the device (contract 1.6). Without effect on results: accepted, validated and kept."""

from __future__ import annotations

import copy

from poptorch._options.base import OptionsDict, is_integer


class TensorLocationSettings(OptionsDict):
    """Where one kind of tensor is stored and when it is sharded; setters return the object."""

    def __init__(self, **default_values: int) -> None:
        super().__init__(**default_values)

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Smallest number of elements to be stored off chip; AssertionError when negative."""
        self._set_number(0, minElementsForOffChip=min_elements)
        return self

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Smallest number of elements to be sharded over replicas; AssertionError when negative."""
        self._set_number(0, minElementsForReplicatedTensorSharding=min_elements)
        return self

    def useOnChipStorage(self, use: bool = True) -> TensorLocationSettings:
        """Store on chip."""
        self._set_typed(bool, onChip=use)
        return self

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Keep only a shard on each replica."""
        self._set_typed(bool, useReplicatedTensorSharding=use)
        return self

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load through the tiles reserved for input and output."""
        self._set_typed(bool, useIOTilesToLoad=use)
        return self

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store through the tiles reserved for input and output."""
        self._set_typed(bool, useIOTilesToStore=use)
        return self


class _TensorLocationOptions(OptionsDict):
    """The settings of activations, weights, optimizer state and accumulators."""

    def __init__(self) -> None:
        super().__init__()

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Tiles reserved for input and output: 0, or even and in 32...192, else AssertionError."""
        valid = is_integer(num_tiles) and (num_tiles == 0 or 32 <= num_tiles <= 192 and num_tiles % 2 == 0)
        assert valid, f"IO tiles are an even number from 32 to 192, got {num_tiles!r}"
        self.createOrSet(numIOTiles=num_tiles)
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Where activations live."""
        return self._keep("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Where weights live."""
        return self._keep("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Where the optimizer state lives."""
        return self._keep("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Where gradient accumulators live."""
        return self._keep("location_accumulator", location)

    def _keep(self, name: str, location: TensorLocationSettings) -> _TensorLocationOptions:
        assert isinstance(location, TensorLocationSettings), f"Expected TensorLocationSettings, got {type(location)}"
        self.createOrSet(**{name: copy.deepcopy(location.toDict())})
        return self
