def write(*a):
    return []
