"""The operations of a model of which only a part is trained: adapters, quantised and frozen weights.

Taken from the sources of peft (`lora.Linear.forward`) and bitsandbytes (`MatMul4Bit`, `MatMul8bitLt`). A frozen weight
has no gradient, so its layer does not save its input, unless an adapter reads that too. Each adapter is a chain of
operations behind its layer, whose backward comes before that of the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ladder.step.operation import Block, Operation
from ladder.workload.modules import Module
from ladder.workload.trained import BYTES_OF_A_WEIGHT, adapted_of, adapter_elements, frozen_of
from ladder.workload.workload import CountedBlock, Workload


class PartlyTrained:
    """What of a workload's model is trained, and the blocks that follow from it."""

    def __init__(self, workload: Workload) -> None:
        self._lora, self._load_in = workload.lora, workload.load_in
        self._width, self._length = workload.width, workload.seq_len
        self._num_layers, self._tied = workload.model.num_layers, workload.model.tied
        self._trains_head = workload.weights.trains_head
        self._matrices = [each for each in workload.model.modules if each.size and each.share and each.elements]
        targets = adapted_of(workload.lora, self._matrices)
        uncopied = [each for each in self._matrices if not each.copied]
        frozen = uncopied if workload.lora is not None else frozen_of(workload.freeze, self._matrices)
        self._targets, self._frozen = frozenset(targets), frozenset(frozen)

    def blocks(self, plain: Sequence[Operation], counted: CountedBlock) -> tuple[Block, ...]:
        """All blocks, from the operations of one that is trained and was `counted`; equal ones are one object."""
        own: dict[int, list[Module]] = {layer: [] for layer in range(self._num_layers)}
        for matrix in self._matrices:
            if matrix.layer is not None:
                own[matrix.layer].append(matrix)
        first, known = self._first_reached(), dict[object, Block]()
        blocks = []
        for layer, matrices in own.items():
            kinds = [(m.reads, m.inputs, m.outputs, m in self._frozen, m in self._targets) for m in matrices]
            kind = (layer >= first, *kinds)
            if kind not in known:
                operations = self._as_counted(self._operations(plain, matrices), matrices, counted)
                known[kind] = Block(operations, reached=layer >= first)
            blocks.append(known[kind])
        return tuple(blocks)

    def last_norm(self, plain: Operation) -> Operation:
        """The norm before the head, which `--freeze` leaves trained."""
        return _frozen(plain) if self._lora is not None else plain

    def trained_of(self, table: int) -> int:
        """Elements that are trained of the `table` of everything that is neither in a block nor the head."""
        if self._lora is not None:
            return sum(each.copied for each in self._matrices if each.layer is None and each.kind != "head")
        return table - sum(each.size for each in self._frozen if each.layer is None and each.kind != "head")

    @property
    def num_outside(self) -> int:
        """Tensors outside the blocks that are trained: tables, the last norm, and the head if it has its own."""
        if self._lora is not None:
            return 0
        tables = any(each.kind == "table" for each in self._matrices if each not in self._frozen)
        return 1 + tables + (self._trains_head and not self._tied)

    def _first_reached(self) -> int:
        """The first block that backward goes through."""
        trains = [each for each in self._matrices if each in self._targets or each not in self._frozen]
        if any(each.kind == "table" for each in trains):
            return 0
        return min((each.layer for each in trains if each.layer is not None), default=self._num_layers)

    def _operations(self, plain: Sequence[Operation], matrices: Sequence[Module]) -> list[Operation]:
        """The operations of a block with these matrices."""
        trains = any(each not in self._frozen for each in matrices)
        needed = {each.reads for each in matrices if each not in self._frozen or self._keeps_input(each)}
        operations, held = list[Operation](), set[str]()
        of = _matrix_of(plain, matrices)
        for place, operation in enumerate(plain):
            matrix = of.get(place)
            if matrix is not None:
                operations.append(self._layer(operation, matrix, keeps_input=operation.reads in needed))
                if self._holds_input(matrix) and operation.reads not in held:
                    held.add(operation.reads)
                    operations[-1] = replace(operations[-1], stays=2.0 * matrix.inputs)
                if matrix in self._targets and of.get(_next_product(plain, place)) is not matrix:
                    operations[-1] = replace(operations[-1], ends=operations[-1].ends + self._width * matrix.inputs)
                    operations += [replace(each, beside=True) for each in self._adapter(matrix)]
            elif operation.name == "biases":
                operations += self._biases(operation, plain, of, matrices) if trains else [_frozen(operation)]
            else:
                operations.append(operation if trains else _frozen(operation))
        return operations

    def _as_counted(
        self, operations: Sequence[Operation], matrices: Iterable[Module], counted: CountedBlock
    ) -> tuple[Operation, ...]:
        """Beside adapters a block keeps what was counted, without what only its weights' gradients need and with what
        adapters read."""
        if not any(each.beside for each in operations):
            return tuple(operations)
        read = {each.reads: each for each in matrices if self._keeps_input(each) and not each.is_kept}
        wanted = counted.kept + counted.kept_by_length * self._length - counted.kept_for_weights
        wanted += self._width * sum(each.inputs * _passes(each) for each in read.values())
        return scaled_to(wanted, operations, operations)

    def _keeps_input(self, matrix: Module) -> bool:
        """Whether an adapter keeps what the layer reads, or a function of 8 bits; dropout makes a copy of its own."""
        reads = matrix in self._targets and (self._lora is None or not self._lora.dropout)
        return reads or self._holds_input(matrix)

    def _holds_input(self, matrix: Module) -> bool:
        """In 8 bits the layer's function keeps its input for nothing, beside what autograd saves and can drop."""
        return self._load_in == "8bit" and matrix.packs

    def _layer(self, operation: Operation, matrix: Module, *, keeps_input: bool) -> Operation:
        """A linear layer that may be frozen or quantised."""
        saves = operation.saves - (0.0 if keeps_input else operation.for_weight)
        packed = self._load_in is not None and matrix.packs
        size = operation.weight[0] * operation.weight[1]
        return replace(
            operation,
            trained=matrix not in self._frozen,
            saves=saves,
            held=BYTES_OF_A_WEIGHT[self._load_in] if packed else 2.0,
            unpacks=2.0 * size if packed else 0.0,
        )

    def _adapter(self, matrix: Module) -> list[Operation]:
        """peft's passes beside a layer: result + B(A(dropout(x))) · scaling."""
        lora, inputs, outputs, width = self._lora, matrix.inputs, matrix.outputs, self._width
        assert lora is not None
        if matrix.kind == "experts":  # their weights are changed before each pass, and saved as they then are
            size = width * matrix.size
            both = adapter_elements(lora, matrix)
            return [Operation(name="changed experts", others=both, tensors=2, fixed=size, unpacks=size)]
        operations = []
        if lora.dropout > 0:
            mask_and_copy, passed = (1.0 + width) * inputs, width * inputs
            operations.append(Operation(name="adapter dropout", saves=mask_and_copy, makes=passed, ends=passed))
        operations += [
            Operation(
                name="adapter A", weight=(inputs, lora.rank), tensors=1, makes=width * inputs, ends=width * lora.rank
            ),
            Operation(
                name="adapter B",
                weight=(lora.rank, outputs),
                tensors=1,
                saves=width * lora.rank,
                makes=width * lora.rank,
                ends=width * outputs,
            ),
            Operation(
                name="adapter sum",
                makes=width * outputs,
            ),
        ]
        if lora.dora:
            operations.append(_magnitude(matrix, width))
        return operations

    def _biases(
        self, biases: Operation, plain: Sequence[Operation], of: Mapping[int, Module], matrices: Iterable[Module]
    ) -> list[Operation]:
        """What belongs to no other operation, as inactive experts do: the part that is trained, and the other."""
        free = sum(each.elements for each in plain) - sum(each.size for each in matrices if each in self._frozen)
        for place, each in enumerate(plain):
            if each is not biases and of.get(place) not in self._frozen:
                free -= each.elements
        free = min(biases.others, max(0, free))
        return [
            replace(biases, others=free),
            Operation(name="others", others=biases.others - free, trained=False),
        ]


def scaled_to(wanted: float, operations: Iterable[Operation], like: Iterable[Operation]) -> tuple[Operation, ...]:
    """`operations` that save as many times as much as makes those `like` them save `wanted`, but for adapters'."""
    factor = wanted / sum(each.saves for each in like if not each.beside)
    return tuple(each if each.beside else replace(each, saves=each.saves * factor) for each in operations)


def _passes(module: Module) -> float:
    """How often a token passes through `module`: through several experts."""
    return module.count * module.share if module.kind == "experts" else 1.0


def _matrix_of(plain: Sequence[Operation], matrices: Sequence[Module]) -> Mapping[int, Module]:
    """By place of a product: its matrix. A fused matrix stands for several products."""
    found: dict[int, Module] = {}
    for letter in {each.reads for each in plain if each.reads}:
        places = [place for place, each in enumerate(plain) if each.reads == letter]
        own = [matrix for matrix in matrices if matrix.reads == letter]
        for number, place in enumerate(places if own else []):
            found[place] = own[number * len(own) // len(places)]
    return found


def _next_product(plain: Sequence[Operation], place: int) -> int:
    """The place of the next product that reads the same; -1 if there is none."""
    letter = plain[place].reads
    return next((later for later in range(place + 1, len(plain)) if plain[later].reads == letter), -1)


def _frozen(operation: Operation) -> Operation:
    """An operation whose parameters, if it has any, have no gradient."""
    return replace(operation, trained=False, saves=operation.saves - operation.for_weight)


def _magnitude(matrix: Module, width: float) -> Operation:
    """DoRA's magnitudes: the norm of the changed weight, which is written for it, and two products with the output."""
    return Operation(
        name="adapter magnitude",
        others=matrix.outputs,
        tensors=1,
        saves=2.0 * width * matrix.outputs,
        makes=width * matrix.outputs,
        ends=width * matrix.outputs,
        unpacks=width * matrix.size,
    )
