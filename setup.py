"""Lists the packages: cpu/, kernels/ and models/ are installed below sparsekv_cli."""

from setuptools import find_packages, setup

FOLDERS = {"sparsekv_cli": "sparsekv_cli"} | {
    f"sparsekv_cli.{folder}": folder for folder in ("cpu", "kernels", "models")
}

setup(
    package_dir=FOLDERS,
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in (package, *(f"{package}.{inner}" for inner in find_packages(folder)))
    ],
)
