"""ptxas and cuobjdump: where they are, and what they say of a kernel. No GPU is needed."""

import collections
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

_PACKAGES = {
    "ptxas": "nvidia-cuda-nvcc",
    "cuobjdump": "nvidia-cuda-cuobjdump",
    "nvdisasm": "nvidia-cuda-nvdisasm",
}
# As it was: another thread may be changing it for its compiler while a tool starts (kernel_cost.py).
_ENVIRONMENT = dict(os.environ)


def find_tool(name: str) -> str:
    """The tool's path: from NVIDIA's wheels in the running interpreter, else from PATH.

    The wheels come first since each release of JAX writes newer PTX, which an older ptxas on PATH refuses.

    Raises:
      FileNotFoundError: it is in neither; the message names the wheel that holds it.
    """
    # The wheels share the namespace package nvidia.
    package = importlib.util.find_spec("nvidia")
    places = list(package.submodule_search_locations or []) if package else []
    found = sorted((str(p) for place in places for p in Path(place).glob(f"cu*/bin/{name}")), reverse=True)
    on_path = shutil.which(name)
    if not found and on_path is None:
        raise FileNotFoundError(f"no {name} among this interpreter's wheels or on PATH: install {_PACKAGES[name]}")
    return found[0] if found else str(on_path)


def _run(command: list[str], **variables: str) -> str:
    """Output and messages of a tool; its messages in the error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**_ENVIRONMENT, **variables})
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout + done.stderr


def assemble(ptx: Path) -> tuple[Path, int, int]:
    """Assemble a kernel for the architecture that its PTX names: cubin, registers and spilled bytes of a thread."""
    target = re.search(r"^\.target\s+(\w+)", ptx.read_text(), re.MULTILINE)
    if target is None:
        raise ValueError(f"{ptx} names no target architecture")
    cubin = ptx.with_suffix(".cubin")
    said = _run([find_tool("ptxas"), "-v", f"-arch={target.group(1)}", str(ptx), "-o", str(cubin)])
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    spilled = max(int(stores) for stores in re.findall(r"(\d+) bytes spill stores", said))
    return cubin, registers, spilled


def hottest_loop(cubin: Path) -> collections.Counter:
    """Instructions by kind of the loop that has the most matrix instructions; empty if no loop has any."""
    disassembler = Path(find_tool("nvdisasm")).parent
    path = f"{disassembler}{os.pathsep}{_ENVIRONMENT.get('PATH', '')}"
    listing = _run([find_tool("cuobjdump"), "--dump-sass", str(cubin)], PATH=path)
    return hottest_loop_of(listing)


def hottest_loop_of(listing: str) -> collections.Counter:
    """As `hottest_loop`, of a disassembly. Of loops with equally many, the shorter: the other one has masks."""
    code = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", listing)]
    texts, successors = [text for _, text in code], _successors(code)
    loops = [[texts[i] for i in loop] for loop in _innermost(_loops(successors), successors, texts)]
    hottest = max(loops, key=lambda loop: (_matrix_instructions(loop), -len(loop)), default=[])
    return collections.Counter(_kind(text) for text in hottest)


def _matrix_instructions(texts) -> int:
    """How many there are."""
    return sum("MMA" in text for text in texts)


def _successors(code) -> list[list[int]]:
    """Which instructions can follow each instruction, by their place in the listing."""
    places = {address: place for place, (address, _) in enumerate(code)}
    successors = []
    for place, (_, text) in enumerate(code):
        target = re.search(r"\bBRA\S*\s.*?(0x[0-9a-f]+)", text)
        # A branch whose condition is an operand, not a prefix, falls through too.
        ends = re.match(r"BRA\S* 0x|EXIT|RET", text) is not None
        following = [] if ends or place + 1 == len(code) else [place + 1]
        if target is not None and int(target[1], 16) in places:
            following.append(places[int(target[1], 16)])
        successors.append(following)
    return successors


def _innermost(loops, successors, texts) -> list[list[int]]:
    """Those loops that have matrix instructions, each as the loops inside it that have, if there are any."""
    found = []
    for loop in loops:
        if not _matrix_instructions(texts[i] for i in loop):
            continue
        inside = set(loop)
        entries = {after for i, some in enumerate(successors) if i not in inside for after in some} & inside
        # Without its entry a loop falls apart into the loops that it holds. The code's own is entered from nowhere.
        inside -= entries or {min(loop)}
        rest = [
            [after for after in some if after in inside] if i in inside else [] for i, some in enumerate(successors)
        ]
        found += _innermost(_loops(rest), rest, texts) or [loop]
    return found


def _loops(successors: list[list[int]]) -> list[list[int]]:
    """The outermost loops: strongly connected components of more than one instruction (Tarjan, without recursion).

    What lies between a backward branch and its target is no loop: waits are laid out far behind the loop they are in.
    """
    index, low, on_stack, stack, loops = {}, {}, set(), [], []
    for root in range(len(successors)):
        work = [] if root in index else [(root, iter(successors[root]))]
        if work:
            index[root] = low[root] = len(index)
            stack.append(root)
            on_stack.add(root)
        while work:
            node, rest = work[-1]
            for after in rest:
                if after not in index:
                    index[after] = low[after] = len(index)
                    stack.append(after)
                    on_stack.add(after)
                    work.append((after, iter(successors[after])))
                    break
                if after in on_stack:
                    low[node] = min(low[node], index[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = stack[stack.index(node) :]
                    del stack[-len(component) :]
                    on_stack.difference_update(component)
                    if len(component) > 1:
                        loops.append(component)
    return loops


def _kind(text: str) -> str:
    """The instruction's name without predicate and modifiers."""
    words = text.split()
    return words[1 if words[0].startswith("@") else 0].split(".")[0]
