#!/usr/bin/env python3
"""Drop expected tensors from a golden case, so that the repository stays small.

Reads one safetensors file and writes the same file without the named tensors. Inputs and metadata are
never touched: `ringattn check` computes what is missing with its oracle. Standard library only.

usage: strip_case.py IN OUT [--drop out,grad_query,grad_key,grad_value]
"""
import argparse
import json
import struct
import sys

EXPECTED = ("out", "lse", "grad_query", "grad_key", "grad_value")
HEADER_ALIGN = 8  # the format asks for data that starts at a multiple of 8 bytes


def read(path):
    """Returns the metadata and {name: (dtype, shape, bytes)} in the order of the file's data."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if end > len(data):
            raise ValueError(f"{path}: {name} ends at byte {end} of {len(data)}")
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return metadata, tensors


def write(path, metadata, tensors):
    header, offset = {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGN)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--drop", default="out,grad_query,grad_key,grad_value")
    args = parser.parse_args()
    drop = args.drop.split(",")
    unknown = [name for name in drop if name not in EXPECTED]
    if unknown:
        sys.exit(f"--drop: {','.join(unknown)}, expected some of {','.join(EXPECTED)}")
    metadata, tensors = read(args.source)
    write(args.target, metadata, {k: v for k, v in tensors.items() if k not in drop})


if __name__ == "__main__":
    main()
