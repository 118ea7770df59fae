"""FlashInfer's released wheels, pinned, whose sources the stand-ins are compared with; nothing of them is run."""

import ast
import zipfile

from overlay_apply.bases import Release
from overlay_apply.fetch import fetch_wheel
from overlay_apply.project import here

SHA256 = {
    "0.6.18": "d5d26edb48f8def0bf28b2c94415aef7f0754e2cd9e3cb3d6e7081262d068aad",
    "0.7.2": "770550a0aa92b2f10e6c9a1f048dd43713f0f3bb6a12710186fcf8e4e9c99bd8",
    "0.7.4": "a051a62e09a2738e8b0de47a1944fd2f0f3eff01b728b662141ea660cb09dd32",
}
# base -> the FlashInfer its metadata asks for
OF_BASE = {"0.5.20": "0.6.18", "0.5.23": "0.7.2"}


def syntax_trees(version, files):
    """``file -> its syntax tree`` of files below the flashinfer package; fetches the wheel into ``build/`` if it is not there."""
    file = f"flashinfer_python-{version}-py3-none-any.whl"
    release = Release(version, file, SHA256[version], "3.11", "manylinux_2_34_x86_64", "flashinfer-python")
    with zipfile.ZipFile(fetch_wheel(here(), release)) as wheel:
        return {file: ast.parse(wheel.read(f"flashinfer/{file}")) for file in files}
